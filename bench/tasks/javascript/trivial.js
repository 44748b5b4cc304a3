// Counts its jobs, as in every contestant, and writes the count to a file when its host exits: see `ran_in_hosts` in
// bench/src/ours.rs.
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

let jobs = 0;
let last = 0;

module.exports = () => {
  jobs += 1;
  last = (performance.timeOrigin + performance.now()) / 1000;
};

process.on("exit", () => {
  if (jobs > 0) fs.appendFileSync(path.join(os.tmpdir(), `graphile-worker-bench-ran-${process.ppid}`), `${jobs} ${last}\n`);
});
