// RegisterCustomOps(): what the runtime calls when a session's options name this library. It adds the domain `quoka`
// with one operator, GroupQueryAttention, for float and for half.
#include "kernel.hpp"

#include <iterator>
#include <list>
#include <mutex>

namespace quoka_onnxruntime {
namespace {

// Says the size of `output` where the model says that of `query`: the runtime's own fusions around the node ask for it.
void infer_output(const OrtApi& api, OrtShapeInferContext& context) {
  OrtTensorTypeAndShapeInfo* sizes = nullptr;  // of an input, and not ours to release
  const auto rank_of = [&](Input which) {
    std::size_t inputs = 0, rank = 0;
    check(api, api.ShapeInferContext_GetInputCount(&context, &inputs));
    if (which >= inputs) return rank;
    check(api, api.ShapeInferContext_GetInputTypeShape(&context, which, &sizes));
    if (sizes != nullptr) check(api, api.GetDimensionsCount(sizes, &rank));
    return rank;
  };
  // Packed queries are longer than the output. A key without a known size counts as absent, too.
  if (rank_of(in_key) == 3 && rank_of(in_query) == 3)
    check(api, api.ShapeInferContext_SetOutputTypeShape(&context, 0, sizes));
}

// The runtime's table of an operator, for tensors of one type.
struct Operator : OrtCustomOp {
  Operator(const OrtApi& of_api, uint32_t of_version, ONNXTensorElementDataType of_type)
      : OrtCustomOp{}, api(of_api), type(of_type) {
    version = of_version;
    GetName = [](const OrtCustomOp*) { return "GroupQueryAttention"; };
    GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };

    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return input_count; };
    GetInputType = [](const OrtCustomOp* op, std::size_t i) {
      const ONNXTensorElementDataType own = input_kinds[i].type;
      return own == own_type ? static_cast<const Operator*>(op)->type : own;
    };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
      return input_kinds[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 3; };
    GetOutputType = [](const OrtCustomOp* op, std::size_t) {
      return static_cast<const Operator*>(op)->type;
    };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
      return i > 0 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    // No list of inputs or outputs has an open end; the runtime asks all the same.
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    GetVariadicInputHomogeneity =
        GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    // Where past and present have one size and nobody else reads the past, both may have one buffer. Those of a
    // session's caller have it where he binds it to both.
    GetMayInplace = [](int** inputs, int** outputs) -> std::size_t {
      static int from[] = {in_past_key, in_past_value}, to[] = {1, 2};
      *inputs = from, *outputs = to;
      return std::size(from);
    };
    ReleaseMayInplace = [](int*, int*) {};

    InferOutputShapeFn = [](const OrtCustomOp* op, OrtShapeInferContext* context) {
      const OrtApi& own = static_cast<const Operator*>(op)->api;
      return guarded(own, [&] { infer_output(own, *context); });
    };
    CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* of, const OrtKernelInfo* info,
                        void** kernel) {
      return guarded(*of, [&] { *kernel = new Kernel(*of, *info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      Kernel& of = *static_cast<Kernel*>(kernel);
      return guarded(of.api(), [&] { of.compute(*context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  const OrtApi& api;
  ONNXTensorElementDataType type;
};

// The domain of one runtime. Sessions refer to it, so it is never freed.
struct Domain {
  Domain(const OrtApi& of, uint32_t version)
      : api(of),
        single(api, version, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
        half(api, version, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) {
    check(api, api.CreateCustomOpDomain("quoka", &domain));
    for (const Operator* op : {&single, &half}) check(api, api.CustomOpDomain_Add(domain, op));
  }

  const OrtApi& api;
  Operator single, half;
  OrtCustomOpDomain* domain = nullptr;
};

Domain& domain_of(const OrtApi& api, uint32_t version) {
  static std::mutex mutex;
  static auto& domains = *new std::list<Domain>;
  const std::lock_guard lock(mutex);
  for (Domain& one : domains)
    if (&one.api == &api) return one;
  return domains.emplace_back(api, version);
}

}  // namespace
}  // namespace quoka_onnxruntime

extern "C" [[gnu::visibility("default")]] OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace quoka_onnxruntime;
  const uint32_t version = common_version(*base);
  const OrtApi* const api = base->GetApi(version);
  if (api == nullptr || version < least_version) {
    const std::string message = std::string("quoka: ONNX Runtime is ") + base->GetVersionString() +
                                ", but must be at least 1." + std::to_string(least_version);
    const OrtApi* const first = base->GetApi(1);
    return first == nullptr ? nullptr : first->CreateStatus(ORT_FAIL, message.c_str());
  }
  return guarded(
      *api, [&] { check(*api, api->AddCustomOpDomain(options, domain_of(*api, version).domain)); });
}
