// Prints an aligned plain text table. A column is right-aligned if all of its cells are numbers (a
// unit or a sign may follow: "12.4 ms", "7.1x", "98 %"; "-" stands for none), and left-aligned
// otherwise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {

// A number for a cell, with a fixed count of decimals.
inline std::string fixed(double value, int decimals) {
  char text[400];  // the largest double has 309 digits before the point
  std::snprintf(text, sizeof text, "%.*f", std::clamp(decimals, 0, 17), value);
  return text;
}

// Columns are two spaces apart. Throws std::invalid_argument if a row has not as many cells as the
// header.
inline void print_table(std::ostream& out, const std::vector<std::string>& header,
                        const std::vector<std::vector<std::string>>& rows) {
  // UTF-8 continuation bytes take no column.
  const auto width = [](const std::string& cell) {
    return static_cast<std::size_t>(std::count_if(cell.begin(), cell.end(), [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
    }));
  };
  const auto number = [](const std::string& cell) {
    const std::size_t first = cell.find_first_not_of("+-.");
    return cell.empty() || first == std::string::npos ||
           (cell[first] >= '0' && cell[first] <= '9') || cell.substr(first) == "nan" ||
           cell.substr(first) == "inf";
  };

  std::vector<std::size_t> widths(header.size());
  std::vector<bool> right(header.size(), !rows.empty());
  for (std::size_t column = 0; column < header.size(); ++column)
    widths[column] = width(header[column]);
  for (const std::vector<std::string>& row : rows) {
    if (row.size() != header.size()) {
      throw std::invalid_argument("table: a row has " + std::to_string(row.size()) +
                                  " cells, the header " + std::to_string(header.size()));
    }
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], width(row[column]));
      right[column] = right[column] && number(row[column]);
    }
  }

  const auto print_row = [&](const std::vector<std::string>& row) {
    std::string line;
    for (std::size_t column = 0; column < row.size(); ++column) {
      const std::string blank(widths[column] - width(row[column]), ' ');
      line +=
          (column == 0 ? "" : "  ") + (right[column] ? blank + row[column] : row[column] + blank);
    }
    out << line.erase(line.find_last_not_of(' ') + 1) << '\n';
  };
  print_row(header);
  std::vector<std::string> rule;
  for (const std::size_t columns : widths) rule.emplace_back(columns, '-');
  print_row(rule);
  for (const std::vector<std::string>& row : rows) print_row(row);
}

}  // namespace quoka_examples
