"""Checkpoints of plain torch and TorchRec models, which live in one process or in ranks: tracked, stored, restored."""
