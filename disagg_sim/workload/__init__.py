"""What arrives: lengths and arrivals as laws, traces out of files or drawn, and what they are like."""
