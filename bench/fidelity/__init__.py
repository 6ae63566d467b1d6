"""How far the simulator is from the live system: the same trace, the same code, side by side (`make fidelity`)."""
