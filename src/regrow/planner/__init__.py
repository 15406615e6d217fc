"""How often a run should save, and which way back is the cheaper one: values in, decisions out, each with its reason.

`overhead.py` has the formulas, `partial.py` the decision, `measured.py` what goes into it (what saves and loads took,
how often servers fail), `scale.py` the same for a growing number of servers. Nothing here reads a clock, a file or a
random number; whoever measures, saves and kills is elsewhere.
"""
