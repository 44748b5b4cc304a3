// Beside what it needs, and linked into the folder of tasks.
module.exports = (_, helpers) => require("./note.cjs")(helpers, "loaded", `linked as ${helpers.job.task_identifier}`);
