"""Where does the difference between two deployments come from? A decomposition that sums, with
intervals.
"""
