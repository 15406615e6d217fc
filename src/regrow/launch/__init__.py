"""Starting a run somewhere and watching it to its end. `local` starts processes on this machine."""
