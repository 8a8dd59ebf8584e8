// A read-only mapping of a whole file into memory (POSIX mmap): pages are read when they are
// touched. If the file shrinks while it is mapped, touching the lost pages ends the process
// (SIGBUS). Windows: the file is read.
#pragma once

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace quoka_examples {

static_assert(sizeof(std::size_t) == 8, "files are mapped whole, which needs a 64-bit process");

class MappedFile {
 public:
  // Throws std::runtime_error if the file cannot be opened or mapped, or is a folder or a pipe.
  explicit MappedFile(const std::string& path) {
#if defined(_WIN32)
    if (!std::filesystem::is_regular_file(path))
      throw std::runtime_error(path + ": cannot open, or not a regular file");
    size_ = static_cast<std::size_t>(std::filesystem::file_size(path));
    if (size_ == 0) return;
    auto* const bytes = new std::byte[size_];
    data_ = bytes;
    if (!std::ifstream(path, std::ios::binary)
             .read(reinterpret_cast<char*>(bytes), static_cast<std::streamsize>(size_)))
      throw std::runtime_error(path + ": cannot read " + std::to_string(size_) + " bytes");
#else
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(path + ": cannot open: " + std::strerror(errno));
    struct stat status {};
    const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    void* address = nullptr;
    if (regular &&
        status.st_size > 0) {  // mmap refuses an empty range: an empty file stays {null, 0}
      size_ = static_cast<std::size_t>(status.st_size);
      address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    const int error = errno;
    ::close(fd);
    if (!regular) throw std::runtime_error(path + ": not a regular file");
    if (address == MAP_FAILED) {
      throw std::runtime_error(path + ": cannot map " + std::to_string(size_) +
                               " bytes: " + std::strerror(error));
    }
    data_ = static_cast<const std::byte*>(address);
#endif
  }
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedFile() {
#if defined(_WIN32)
    delete[] data_;
#else
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
#endif
  }

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace quoka_examples
