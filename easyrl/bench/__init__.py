"""Where every figure comes from: `easyrl bench ring | engine | pipeline`."""
