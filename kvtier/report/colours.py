"""Colours that people with the common kinds of colour blindness tell apart.

Source: Okabe and Ito, Color Universal Design (2008).
"""

INK = "#222222"
BLUE = "#0072B2"
SKY = "#56B4E9"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
GREEN = "#009E73"
GREY = "#C8C8C8"
