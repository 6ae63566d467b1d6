"""One model replica: the engine loop (`core`) and the process around it (`service`)."""
