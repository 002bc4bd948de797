"""`outpace deploy MODEL --ray`: the server of `outpace serve` as a Ray Serve application, replicated over a cluster."""
