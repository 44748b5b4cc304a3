const done = require("../lib/done.cjs");

// Takes the payload and no helpers.
module.exports = async (payload) => {
  await done.with(payload);
};
