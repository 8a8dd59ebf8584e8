// A callable of any type, borrowed for a call: what std::function is, without owning or allocating.
#pragma once

#include <quoka/base/version.hpp>

#include <memory>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

template <class Signature>
class FunctionRef;

// A callable of any type, borrowed: it must outlive this. Two pointers; nothing is allocated.
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  // Refers to f, which is not copied.
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> &&
           std::is_invocable_r_v<R, F&, Args...>) FunctionRef(F&& f)
      : f_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* function, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(function))(std::forward<Args>(args)...);
        }) {}

  // Calls it.
  R operator()(Args... args) const { return call_(f_, std::forward<Args>(args)...); }

 private:
  void* f_;
  R (*call_)(void*, Args...);
};

}  // namespace QUOKA_ABI
}  // namespace quoka
