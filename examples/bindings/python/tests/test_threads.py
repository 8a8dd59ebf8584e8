#!/usr/bin/env python3
"""Whose threads run a call: the library's, or those of an OpenMP. Uses that of the compiler, libgomp, where there is one."""
import ctypes
import ctypes.util
import multiprocessing
import os
import signal
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import quoka

LIBGOMP = ctypes.util.find_library("gomp")


def threads_of_process():
    return len(os.listdir("/proc/self/task"))


def arrays(keys=300):
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((1, heads, n, 32)).astype(np.float32) for heads, n in ((8, 40), (4, keys)))
    return q, k


def attend(q, k, threads=0):
    return quoka.attention(q, causal=False, past_k=k, past_v=k, threads=threads)


def in_a_child(q, k, expected, queue):
    queue.put(np.array_equal(attend(q, k), expected))


@unittest.skipUnless(LIBGOMP and os.path.isdir("/proc/self/task"), "there is no libgomp, or no /proc")
class OpenMp(unittest.TestCase):
    own = 0  # threads of the library's that were begun

    def setUp(self):
        self.gomp = ctypes.CDLL(LIBGOMP)
        self.gomp.omp_set_num_threads(3)
        self.q, self.k = arrays()
        self.expected = attend(self.q, self.k, threads=1)
        self.addCleanup(quoka.use_openmp_of, None)

    def test_it_runs_calls_of_as_many_threads(self):
        before = threads_of_process()
        quoka.use_openmp_of(LIBGOMP)
        for threads in (0, 3):
            np.testing.assert_array_equal(attend(self.q, self.k, threads), self.expected)
        here = threads_of_process()
        self.assertIn(here - before, (0, 2))  # those of OpenMP; 0: another test began them
        here -= self.own
        np.testing.assert_array_equal(attend(self.q, self.k, 27), self.expected)
        type(self).own = 26  # another number: the library's own
        self.assertEqual(threads_of_process() - here, 26)
        self.assertEqual(self.gomp.omp_get_max_threads(), 3)
        quoka.use_openmp_of(None)
        np.testing.assert_array_equal(attend(self.q, self.k, 5), self.expected)
        self.assertEqual(threads_of_process() - here, 26)  # of the same pool

    def test_each_thread_has_its_own_scratch(self):
        q, k = arrays(30000)  # long enough for threads to meet
        expected = attend(q, k, threads=1)
        quoka.use_openmp_of(LIBGOMP)
        for _ in range(8):
            np.testing.assert_array_equal(attend(q, k), expected)

    def test_set_threads_says_how_many(self):
        quoka.use_openmp_of(LIBGOMP)
        self.addCleanup(quoka.set_threads, 0)
        quoka.set_threads(31)  # not the OpenMP's 3
        before = threads_of_process() - self.own
        attend(self.q, self.k)
        type(self).own = 30
        self.assertEqual(threads_of_process() - before, 30)

    def test_selection_has_the_same_bits(self):
        expected = [quoka.select(self.q, self.k, budget=30, preset=preset, threads=1) for preset in ("paper", "recommended")]
        quoka.use_openmp_of(LIBGOMP)
        for _ in range(20):
            self.assertEqual([quoka.select(self.q, self.k, budget=30, preset=p) for p in ("paper", "recommended")], expected)

    def test_several_threads_call(self):
        quoka.use_openmp_of(LIBGOMP)
        with ThreadPoolExecutor(3, initializer=lambda: self.gomp.omp_set_num_threads(3)) as callers:
            equal = list(callers.map(lambda _: np.array_equal(attend(self.q, self.k), self.expected), range(60)))
        self.assertEqual(equal, [True] * 60)

    def test_after_a_fork(self):
        quoka.use_openmp_of(LIBGOMP)
        attend(self.q, self.k)
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        child = fork.Process(target=in_a_child, args=(self.q, self.k, self.expected, queue))
        child.start()
        try:
            self.assertTrue(queue.get(timeout=60))
        finally:
            child.kill()

    def test_a_signal_ends_a_call(self):
        q, k = arrays(300000)
        quoka.use_openmp_of(LIBGOMP)
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            for _ in range(2000):
                attend(q, k)
        timer.join()
        np.testing.assert_array_equal(attend(self.q, self.k), self.expected)

    def test_is_refused(self):
        for library, word in (("libnone.so", "libnone.so is not loaded"), ("libc.so.6", "was not linked with OpenMP")):
            with self.assertRaises(ValueError) as caught:
                quoka.use_openmp_of(library)
            self.assertIn(word, str(caught.exception))


@unittest.skipUnless(os.path.isdir("/proc/self/task"), "there is no /proc")
class Pool(unittest.TestCase):
    def test_there_is_one_of_the_largest_number(self):
        q, k = arrays()
        expected = attend(q, k, threads=1)
        begun = threads_of_process()
        for threads in (*range(1, 41), *range(40, 0, -1)):
            np.testing.assert_array_equal(attend(q, k, threads=threads), expected)
        self.assertLessEqual(threads_of_process() - begun, 39)

    def test_a_smaller_number_of_its_threads(self):
        q, k = arrays(30000)
        expected = attend(q, k, threads=1)
        attend(q, k, threads=40)
        with ThreadPoolExecutor(4) as callers:  # one of which needs a larger pool meanwhile
            equal = list(callers.map(lambda n: np.array_equal(attend(q, k, threads=n), expected), (2, 3, 41, 5) * 5))
        self.assertEqual(equal, [True] * 20)


if __name__ == "__main__":
    unittest.main()
