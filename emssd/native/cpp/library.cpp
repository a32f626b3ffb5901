// The operators `torch.ops.emssd_native`. This part alone knows PyTorch.

#include <ATen/Parallel.h>

#include "choice.h"
#include "program.h"
#include "recurrence.h"
#include "step.h"

namespace emssd {

void on_threads(int64_t count, int64_t grain, void (*use)(const void*, int64_t, int64_t), const void* with) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { use(with, begin, end); });
}

int num_threads() { return at::get_num_threads(); }

namespace {

TORCH_LIBRARY(emssd_native, library) {
  library.def("argmax(Tensor logits) -> Tensor");
  library.impl("argmax", c10::DispatchKey::CPU, TORCH_FN(argmax));
  library.def("top(Tensor logits, int k, float scale) -> Tensor");
  library.impl("top", c10::DispatchKey::CPU, TORCH_FN(top));
  library.def("sample(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps) -> Tensor");
  library.impl("sample", c10::DispatchKey::CPU, TORCH_FN(sample));
  library.def(
      "top_draws(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps, float error, int width) -> Tensor");
  library.impl("top_draws", c10::DispatchKey::CPU, TORCH_FN(top_draws));
  library.def("noise_bits(Tensor keys, Tensor positions, int vocab_size) -> Tensor");
  library.impl("noise_bits", c10::DispatchKey::CPU, TORCH_FN(noise_bits));
  library.def(
      "recur(Tensor inputs, Tensor query, Tensor(a!) states, Tensor? rates, Tensor tokens, Tensor paths, int decay_keys, "
      "int decay_values) -> Tensor");
  library.impl("recur", c10::DispatchKey::CPU, TORCH_FN(recur));
  library.def("new_module() -> Tensor", TORCH_FN(new_module));
  library.def("add_weight(Tensor handle, Tensor weight, Tensor? bias) -> ()");
  library.impl("add_weight", c10::DispatchKey::CPU, TORCH_FN(add_weight));
  library.def("free_module_address() -> int", [] { return reinterpret_cast<int64_t>(&free_module); });
  library.def("linear(Tensor input, Tensor handle, int index, int out_features) -> Tensor");
  library.impl("linear", c10::DispatchKey::CPU, TORCH_FN(linear));
  library.def("pack(Tensor values, Tensor scale, Tensor? minimum, int bits) -> Tensor");
  library.impl("pack", c10::DispatchKey::CPU, TORCH_FN(pack));
  library.def("packed_linear(Tensor input, Tensor weight, Tensor? bias, int outputs) -> Tensor");
  library.impl("packed_linear", c10::DispatchKey::CPU, TORCH_FN(packed_linear));
  library.def("packed_embedding(Tensor indices, Tensor weight, int width) -> Tensor");
  library.impl("packed_embedding", c10::DispatchKey::CPU, TORCH_FN(packed_embedding));
  library.def("plain_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.impl("plain_linear", c10::DispatchKey::CPU, TORCH_FN(plain_linear));
  library.class_<Step>("Step")  // methods: operators with an object as an argument take Python's slow road
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, const Integers&, const Integers&, const Integers&,
                       const Integers&, const std::optional<Integers>&, const std::optional<Integers>&, std::vector<double>,
                       Integers, std::vector<double>, std::vector<std::optional<Tensor>>>())
      .def("attend", &attend_step)
      .def("run", &run_step);
  library.def("attend_layer(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor");
  library.impl("attend_layer", c10::DispatchKey::CPU, TORCH_FN(attend_layer));
  library.def("open_program(Tensor handle, str path) -> str[]");
  library.impl("open_program", c10::DispatchKey::CPU, TORCH_FN(open_program));
  library.def("load_constants(Tensor handle, str[] names, Tensor[] tensors) -> ()");
  library.impl("load_constants", c10::DispatchKey::CPU, TORCH_FN(load_constants));
  library.def("run_program(Tensor handle, Tensor[] inputs) -> Tensor[]");
  library.impl("run_program", c10::DispatchKey::CPU, TORCH_FN(run_program));
  library.def("move(Tensor(a!) pages, Tensor sources, Tensor targets, bool are_values) -> ()");
  library.impl("move", c10::DispatchKey::CPU, TORCH_FN(move));
}

}  // namespace
}  // namespace emssd
