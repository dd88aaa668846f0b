"""The life of a job as a picture.

`lines` reads events, `clocks` puts those of several machines on one clock, `walk` and `marks` say what each node did and what
happened, `of_events` and `of_document` make one `course` of it: all of them pure. `picture` and `page` draw it.
"""
