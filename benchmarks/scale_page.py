def page(runs):
    return "x"
