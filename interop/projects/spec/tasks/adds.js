const note = require("../lib/note.cjs");

module.exports = async (_, helpers) => {
  const { addJob } = helpers;
  const { task_identifier, payload } = await addJob("task_2", { foo: "bar" });
  await note(helpers, "adds", { task_identifier, payload });
};
