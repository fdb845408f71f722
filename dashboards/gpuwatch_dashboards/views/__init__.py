"""The pages of the Streamlit app, one file each. Not called `pages`: Streamlit runs the files of such a folder by itself."""
