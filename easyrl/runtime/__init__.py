"""Place, spawn, watch and stop the workers. The runtime knows no tensor."""
