"""The life of a job as a picture.

`events` reads events and puts those of several machines on one clock; `builder` makes a timeline (`model`) of them, or of the
status of a job; `picture` draws it. All but `picture` are pure.
"""
