"""The deterministic simulator: the real coordinator, servers and sessions in one process, under a scheduler that
may let anything happen next. Run it with `regrow sim`.

    choices    all chance, as one tape of small numbers        world      nodes, channels, what may happen next
    faults     what may go wrong, and how much of it           workers    what the simulated workers compute
    checkers   what must hold, checked as it goes              reference  what the rows must be
    shrink     a shorter tape that fails the same way          story      the life of one row
    planted    known bugs, put back on purpose                 probes     how often rare paths were reached
    net        channels, with the real link numbering          launcher   who starts successors
    machines   where it looks inside the real machines         runner     one run; `command` is the command line
    cuts       the storage of checkpoints, and what must be on it
"""
