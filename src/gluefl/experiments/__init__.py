"""Many runs: comparisons, studies, reports, benchmarks, theory."""
