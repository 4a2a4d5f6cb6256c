"""Real models, real servers and damage to them: for the demo, the tests and the benchmarks."""
