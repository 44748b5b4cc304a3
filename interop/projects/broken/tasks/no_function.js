module.exports = { run: async () => {} };
