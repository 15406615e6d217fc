"""The command line: options in, one message or one result out. One file for each command, and its views beside it."""
