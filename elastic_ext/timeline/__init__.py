"""The life of a job, from the events of its agents.

`events` reads them and puts those of several machines on one clock; `spans` makes a timeline of them. `svg` writes it as a
picture, `trace` as a trace for Perfetto and Chrome. All are pure.
"""
