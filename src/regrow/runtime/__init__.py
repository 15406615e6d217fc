"""Drivers: sockets, threads, clocks and processes around the state machines of `regrow.core`."""
