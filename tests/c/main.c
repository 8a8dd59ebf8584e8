int quoka_c_test(void); /* the number of checks that failed */

int main(void) { return quoka_c_test() > 0; }
