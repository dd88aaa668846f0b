"""A job's life as a picture, from the events that its agents have written.

told.py     reads the lines of `events_file`
clocks.py   puts the hosts' clocks over each other
story.py    what each node did when, and what happened to the job; pure
picture.py  draws it as PNG, SVG or HTML
"""
