"""Reports render a verdict and decide nothing."""
