// The threads of an OpenMP that the process has already, torch's for one, as an executor: a model
// whose products run in them and whose attention had threads of its own would have two threads for
// each processor.
#pragma once

#include <quoka/runtime/executor.hpp>

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <string>

namespace quoka_python {

using quoka::Index;

// Found by the names that compilers call: libgomp, libomp and libiomp5 all have them.
class OpenMp {
 public:
  // The one that a loaded library was linked with. Throws std::invalid_argument where the library
  // is not loaded, or has none.
  explicit OpenMp(const std::string& library) {
    void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) quoka::detail::fail_because(library + " is not loaded");
    // Among what the library was linked with. The handle stays, and so does the library.
    find(handle, "GOMP_parallel", parallel_, library);
    find(handle, "omp_get_thread_num", thread_number_, library);
    find(handle, "omp_get_max_threads", most_threads_, library);
  }

  // How many threads the calling thread's parallel regions have.
  int threads() const { return most_threads_(); }
  // After a fork() its threads are not there, and it would wait for them.
  bool usable() const { return getpid() == process_; }
  // f(data) by each of `threads` threads, which no exception may leave.
  void parallel(int threads, void (*f)(void*), void* data) const {
    parallel_(f, data, static_cast<unsigned>(threads), 0);
  }
  // The number of the calling thread, in f.
  int thread_number() const { return thread_number_(); }

 private:
  template <class F>
  static void find(void* handle, const char* name, F& function, const std::string& library) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr)
      quoka::detail::fail_because(library + " was not linked with OpenMP: there is no " + name);
  }

  void (*parallel_)(void (*f)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*thread_number_)() = nullptr;
  int (*most_threads_)() = nullptr;
  pid_t process_ = getpid();
};

// `threads` threads of an OpenMP. The number must be that of its threads(): with another one it
// would end threads, and start new ones in the next region.
class OpenMpThreads {
 public:
  OpenMpThreads(const OpenMp& of, int workers) : of_(of), workers_(workers) {}

  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) const {
    if (tasks <= 1 || workers_ == 1) return quoka::SerialExecutor{}.run(tasks, f);
    Job job{of_, quoka::TaskRef(f), tasks};
    of_.parallel(
        workers_, [](void* data) { static_cast<Job*>(data)->work(); }, &job);
    if (job.error != nullptr) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    const OpenMp& of;
    quoka::TaskRef f;
    Index tasks;
    std::atomic<Index> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error = nullptr;

    // Until no task is left to begin, or one throws.
    void work() {
      const int worker = of.thread_number();
      for (Index task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) try {
          f(task, worker);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
          next.store(tasks, std::memory_order_relaxed);
        }
    }
  };

  OpenMp of_;
  int workers_;
};

}  // namespace quoka_python
