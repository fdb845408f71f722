"""The pages of the Streamlit app, one file each."""
