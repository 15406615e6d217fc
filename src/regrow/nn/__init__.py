"""What a model author touches: embedding tables on servers, the DLRM, its presets and its training loop."""
