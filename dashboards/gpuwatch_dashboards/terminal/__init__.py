"""`gpuwatch top`: the live page's facts in a terminal. Pure functions make lines of text; screen.py alone touches the terminal."""
