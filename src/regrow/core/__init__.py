"""The protocol as plain state machines: an event goes in, a list of effects comes out.

Nothing here reads a clock, opens a file or socket, starts a thread, draws a random number or knows torch;
the drivers in `regrow.runtime` do. The same classes therefore run over sockets, in one process, and under a
simulator.
"""
