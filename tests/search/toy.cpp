extern "C" __attribute__((visibility("default"))) int tile() { return TILE; }
