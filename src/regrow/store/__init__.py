"""What holds the rows of a shard."""
