// Everything that is wrong with what was written, not the first of it alone.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace quoka_examples {

class Refusals {
 public:
  // Runs read(); what it throws as std::invalid_argument is noted.
  template <class Read>
  void in(Read&& read) {
    try {
      read();
    } catch (const std::invalid_argument& e) {
      std::string_view reason = e.what();
      if (!all_.empty() && reason.starts_with("quoka: ")) reason.remove_prefix(7);  // said once
      all_.append(all_.empty() ? "" : "; ").append(reason);
    }
  }
  // Throws std::invalid_argument with all reasons in one line.
  void throw_if_any() const {
    if (!all_.empty()) throw std::invalid_argument(all_);
  }

 private:
  std::string all_;
};

}  // namespace quoka_examples
