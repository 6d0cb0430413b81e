"""The benchmarks behind `gluefl bench`: each compares within one run and prints ratios. No timing in tests."""
