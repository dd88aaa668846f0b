"""What a job can expect before it runs: where its time will go, and the settings that follow. Pure.

expectation.py  the closed form: from rates and times of failures to shares of the job's time
times.py        what the phases of a recovery take: our own measurements, published figures, and the product's own limits
advice.py       one job: its failures, what to expect, what to set, and what limits it
"""
