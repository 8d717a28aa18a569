"""From clocks to weights: how any peer gets the policy that a clock names."""
