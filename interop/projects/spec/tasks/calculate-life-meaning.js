const note = require("../lib/note.cjs");

module.exports = async ({ value }, helpers) => {
  await note(helpers, "calculate-life-meaning", { isMeaning: value === 6 * 7 });
};
