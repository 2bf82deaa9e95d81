// The kernels of the tests, and one that passes a trial on zeros and dies in real use.
#include "../../agent/worker/kernels.c"

KERNEL(dies_in_use) {
  if (data(&args[0])[0] != 0) abort();
  return __tvm_ffi_twice(self, args, num_args, result);
}
