// What was done in this process, for a task that has helpers to note it.
const all = [];

module.exports = { all, with: async (payload) => all.push(payload) };
