alignas(1024) unsigned char shared[232448];
