// Prints an aligned plain text table. A column is right-aligned if all of its cells are numbers,
// and left-aligned otherwise. A unit or a sign may follow ("12.4 ms", "7.1x", "98 %"); "-" stands
// for none.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace quoka_examples {

// Cells are written as one text with tabs between them:
//
//   Table table("tokens\tprefill\tspeedup");
//   table.row("{}\t{:.2f} s\t{:.2f}x", tokens, seconds, speedup);
class Table {
 public:
  explicit Table(const std::string& header) : rows_{cells_of(header)} {}

  template <class... Values>
  void row(fmt::format_string<Values...> cells, Values&&... values) {
    rows_.push_back(cells_of(fmt::format(cells, std::forward<Values>(values)...)));
  }
  // More cells for the last row; before the first row, for the header.
  template <class... Values>
  void more(fmt::format_string<Values...> cells, Values&&... values) {
    for (std::string& cell : cells_of(fmt::format(cells, std::forward<Values>(values)...)))
      rows_.back().push_back(std::move(cell));
  }
  bool empty() const { return rows_.size() == 1; }

  // Columns are two spaces apart. Cells that a row lacks are empty.
  void print(std::ostream& out = std::cout) const {
    std::vector<std::size_t> widths;
    std::vector<bool> right;
    for (const auto& row : rows_)
      for (std::size_t column = 0; column < row.size(); ++column) {
        if (column == widths.size()) widths.push_back(0), right.push_back(!empty());
        widths[column] = std::max(widths[column], row[column].size());
        if (&row != &rows_.front()) right[column] = right[column] && is_number(row[column]);
      }
    const auto line = [&](const std::vector<std::string>& row) {
      std::string text;
      for (std::size_t column = 0; column < row.size(); ++column)
        text += right[column] ? fmt::format("{:>{}}  ", row[column], widths[column])
                              : fmt::format("{:<{}}  ", row[column], widths[column]);
      out << text.erase(text.find_last_not_of(' ') + 1) << '\n';
    };
    std::vector<std::string> rule;
    for (const std::size_t width : widths) rule.emplace_back(width, '-');
    line(rows_.front()), line(rule);
    std::for_each(rows_.begin() + 1, rows_.end(), line);
  }

 private:
  static std::vector<std::string> cells_of(const std::string& text) {
    std::vector<std::string> cells(1);
    for (const char c : text)
      if (c == '\t')
        cells.emplace_back();
      else
        cells.back() += c;
    return cells;
  }
  static bool is_number(const std::string& cell) {
    const std::size_t first = cell.find_first_not_of("+-.");
    return first == std::string::npos || (cell[first] >= '0' && cell[first] <= '9') ||
           cell.substr(first) == "nan" || cell.substr(first) == "inf";
  }

  std::vector<std::vector<std::string>> rows_;  // the header first
};

}  // namespace quoka_examples
