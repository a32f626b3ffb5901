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
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  library.def("argmax(Tensor logits) -> Tensor", cpu(TORCH_FN(argmax)));
  library.def("top(Tensor logits, int k, float scale) -> Tensor", cpu(TORCH_FN(top)));
  library.def("sample(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps) -> Tensor",
              cpu(TORCH_FN(sample)));
  library.def(
      "top_draws(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps, float error, int width) -> Tensor",
      cpu(TORCH_FN(top_draws)));
  library.def("noise_bits(Tensor keys, Tensor positions, int vocab_size) -> Tensor", cpu(TORCH_FN(noise_bits)));
  library.def(
      "recur(Tensor inputs, Tensor query, Tensor(a!) states, Tensor? rates, Tensor tokens, Tensor paths, int decay_keys, "
      "int decay_values) -> Tensor",
      cpu(TORCH_FN(recur)));
  library.def("new_module() -> Tensor", TORCH_FN(new_module));
  library.def("add_weight(Tensor handle, Tensor weight, Tensor? bias) -> ()", cpu(TORCH_FN(add_weight)));
  library.def("free_module_address() -> int", [] { return reinterpret_cast<int64_t>(&free_module); });
  library.def("linear(Tensor input, Tensor handle, int index, int out_features) -> Tensor", cpu(TORCH_FN(linear)));
  library.def("pack(Tensor values, Tensor scale, Tensor? minimum, int bits) -> Tensor", cpu(TORCH_FN(pack)));
  library.def("packed_linear(Tensor input, Tensor weight, Tensor? bias, int outputs) -> Tensor", cpu(TORCH_FN(packed_linear)));
  library.def("packed_embedding(Tensor indices, Tensor weight, int width) -> Tensor", cpu(TORCH_FN(packed_embedding)));
  library.def("plain_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", cpu(TORCH_FN(plain_linear)));
  library.class_<Step>("Step")  // methods: operators with an object as an argument take Python's slow road
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, const Integers&, const Integers&, const Integers&,
                       const Integers&, const std::optional<Integers>&, const std::optional<Integers>&, std::vector<double>,
                       Integers, std::vector<double>, std::vector<std::optional<Tensor>>>())
      .def("attend", &attend)
      .def("run", &run_step);
  library.def("attend_layer(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor",
              cpu(TORCH_FN(attend_layer)));
  library.def("open_program(Tensor handle, str path) -> str[]", cpu(TORCH_FN(open_program)));
  library.def("load_constants(Tensor handle, str[] names, Tensor[] tensors) -> ()", cpu(TORCH_FN(load_constants)));
  library.def("run_program(Tensor handle, Tensor[] inputs) -> Tensor[]", cpu(TORCH_FN(run_program)));
  library.def("move(Tensor(a!) pages, Tensor sources, Tensor targets, bool are_values) -> ()", cpu(TORCH_FN(move)));
}

}  // namespace
}  // namespace emssd
