// Greedy merging of neighbours, the loop that both kinds of byte-pair encoding share.
//
// A text is a row of symbols. Of all neighbouring pairs that may merge, the one of the lowest cost
// goes first, and of those the leftmost; it becomes one symbol, whose two pairs with its new
// neighbours are then candidates too. The end is reached when no pair may merge.
//
// Cost: a heap of candidates, at most 3 for each symbol of the text, so O(n log n) time for n
// symbols, whatever the text; memory 40 n + up to 120 n bytes. Candidates that a merge has made
// stale are recognised by their size when they come up, not searched for.
// Source: the priority queue is that of github.com/google/sentencepiece, src/bpe_model.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include <quoka/base/index.hpp>

#include "decoder/text/vocabulary.hpp"

namespace quoka_decoder {

using quoka::Index;

struct Symbol {
  Index begin;  // first byte in the text
  Index size;   // bytes; 0 once the symbol on its left has swallowed it
  Token token;  // no_token: the vocabulary does not have it
  Index next;   // the symbol on its right, or -1
  Index prev;
};

struct Merge {
  double cost;  // holds every float and every rank exactly
  Token token;  // what the two become
};

// Reused from text to text, it stops allocating.
class PairMerger {
 public:
  void clear() {
    symbols_.clear();
    end_ = 0;
  }

  // The next symbols of the text.
  void append(Index size, Token token) {
    const Index index = std::ssize(symbols_);
    if (index > 0) symbols_.back().next = index;
    symbols_.push_back({end_, size, token, -1, index - 1});
    end_ += size;
  }

  // find(left, right): std::optional<Merge> of two neighbouring Symbols.
  template <class Find>
  void merge(const Find& find) {
    heap_.clear();
    for (Index i = 0; i + 1 < std::ssize(symbols_); ++i) consider(find, i, i + 1);
    while (!heap_.empty()) {
      const Candidate best = heap_.front();
      std::pop_heap(heap_.begin(), heap_.end(), goes_later);
      heap_.pop_back();
      Symbol& left = at(best.left);
      Symbol& right = at(best.right);
      // If both still live they are still neighbours, and the left one, which grows only by
      // swallowing the right one, is as it was.
      if (left.size == 0 || right.size == 0 || left.size + right.size != best.size) continue;
      left.size += right.size;
      left.token = best.token;
      left.next = right.next;
      right.size = 0;
      if (left.next >= 0) at(left.next).prev = best.left;
      consider(find, left.prev, best.left);
      consider(find, best.left, left.next);
    }
  }

  // f(symbol), from left to right.
  template <class F>
  void for_each(const F& f) const {
    for (Index i = symbols_.empty() ? -1 : 0; i >= 0;) {
      const Symbol& symbol = symbols_[static_cast<std::size_t>(i)];
      f(symbol);
      i = symbol.next;
    }
  }

 private:
  struct Candidate {
    double cost;
    Index left, right;
    Index size;  // of both, in bytes
    Token token;
  };

  static bool goes_later(const Candidate& a, const Candidate& b) {
    return a.cost > b.cost || (a.cost == b.cost && a.left > b.left);
  }

  Symbol& at(Index i) { return symbols_[static_cast<std::size_t>(i)]; }

  template <class Find>
  void consider(const Find& find, Index left, Index right) {
    if (left < 0 || right < 0) return;
    const std::optional<Merge> merge = find(at(left), at(right));
    if (!merge) return;
    heap_.push_back({merge->cost, left, right, at(left).size + at(right).size, merge->token});
    std::push_heap(heap_.begin(), heap_.end(), goes_later);
  }

  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  Index end_ = 0;  // bytes so far
};

}  // namespace quoka_decoder
