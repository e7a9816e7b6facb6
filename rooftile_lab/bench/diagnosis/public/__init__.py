"""Programs that follow public ones, written anew: each file is a script with a model, data, and a loop of its own.

    rooftile diagnose rooftile_lab/bench/diagnosis/public/nanogpt.py -- --size toy

`rooftile_lab.bench.diagnosis.cases` has the twenty cases that are made of them, and what is known of each without a diagnosis.
"""
