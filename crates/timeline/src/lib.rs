//! Stage stamps and latency histograms.
