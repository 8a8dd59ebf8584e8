// Makes node-llama-cpp load the backend: to be imported before getLlama() is called, in the program's main thread.
"use strict";
const fs = require("node:fs");
const path = require("node:path");

// The file for this machine, or null where the package has none: then nothing is done.
const file = path.join(__dirname, "lib", `${process.platform}-${process.arch}`, "libggml-quoka.so");
exports.path = fs.existsSync(file) ? file : null;
if (exports.path !== null && !process.env.GGML_BACKEND_PATH) process.env.GGML_BACKEND_PATH = exports.path;

// Settings by their keys, {mode: "recommended", budget: 0.25}, before getLlama(); without this call attention is exact.
exports.settings = function settings(values) {
  for (const [key, value] of Object.entries(values))
    process.env[`QUOKA_${key.toUpperCase()}`] = typeof value === "string" ? value : JSON.stringify(value);
};
