"""The pages of the Streamlit app, one file each. Not called `pages`: Streamlit runs such a folder's files by itself."""
